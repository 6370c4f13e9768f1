"""Selective state spaces (Mamba): a row of numbers per channel, each decaying at its own pace, all read together."""
