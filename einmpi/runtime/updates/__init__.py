"""Updates of tensors a part at a time, without the whole of what is added to them."""
