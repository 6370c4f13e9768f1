"""What goes into a model: token ids, chat templates and pixel tensors."""
