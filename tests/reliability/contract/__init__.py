"""Random calls of everything public, each either right by an oracle of its own or refused by name.

`calls` says what a call is, `draw` makes random numbers, tensors and caches, `cases_*` make right calls with their
oracles, `mutate` spoils them, and `run` makes call number i of a seed, judges it and says how to make it again. The
oracles (`formats`, `maths`) are float64 and use nothing of the library.
"""
