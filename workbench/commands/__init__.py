"""One module per verb of the command line: its options, and the rung it calls."""
