"""Benchmarks: this project beside a baseline, the least the machine must do, and beside what a user would use instead.

`bursar bench NAME` runs one anywhere: it brings its own throw-away databases. Everything is a ratio of two rates that
were measured in one run, window by window in turn, so that other load on the machine affects both. Each module says
what its figures are and are not: `baseline` the least, `plain` the peer, `ledger` the cases.
"""
