"""`tamis bench door`: the functions that a program calls, timed as it calls them, beside their peers."""
