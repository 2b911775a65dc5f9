"""The lean runtime: bundle, tokenizer, states, noise, drafters, verification, the decode loop. No torch, no onnx."""
