"""Attention without softmax: a matrix per head that decays, is read and is written, token after token."""
