"""PostgreSQL: production. asyncpg, arrays, a group in two round trips."""
