"""The prefill fleet: computes prompts and offers their KV by tickets."""
