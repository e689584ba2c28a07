"""Native Sparse Attention, a 125M language model made of it, and its training with DeepSpeed."""
