"""The head: from the last layer to the loss, and the gradient back. Start with `output`."""
