-- Nothing: this number belongs to a change that is made elsewhere, and its file replaces this one.
-- runs_from: 1

SELECT 1;
