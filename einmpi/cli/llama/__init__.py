"""The command `einmpi llama`: text, logits, plans and job files of a language model."""
