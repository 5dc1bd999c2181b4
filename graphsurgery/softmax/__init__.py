"""The unified max form of a site's softmax: what is decided for it, and the operators it becomes."""
