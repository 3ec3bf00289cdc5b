"""SQLite: the embedded default. One file, write-ahead log, synchronous=FULL, one writer thread."""
