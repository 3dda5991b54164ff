"""vLLM in the training processes: the only package that imports vllm."""
