"""Training and measuring order models: recorded trajectories, examples, the training loop, replay."""
