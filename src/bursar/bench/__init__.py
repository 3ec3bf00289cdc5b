"""Benchmarks: this project beside the least the machine must do, and beside what a user would pick instead.

`bursar bench NAME` runs one anywhere: it brings its own throw-away databases. Everything is a ratio of two rates that
were measured in one run, window by window in turn, so that whatever else the machine is doing hits both. Each module
says what its figures are and are not: `baseline` the least, `plain` the peer, `ledger` the cases.
"""
