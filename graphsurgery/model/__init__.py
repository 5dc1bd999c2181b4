"""Access to the model: the ModelProto is the truth, one index reads it, one rewriter changes it."""
