"""Withdrawals: a user asks, rules and people decide, a payout pays."""
