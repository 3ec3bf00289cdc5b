"""`bursar demo`: the whole system killed with money in flight (story), and how it is shown (command)."""
