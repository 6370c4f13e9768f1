"""Input that has broken a parser, or might: what is fuzzed, how, and the corpus that is kept."""
