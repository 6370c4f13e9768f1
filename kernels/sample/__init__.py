"""The draw of one token from logits."""
