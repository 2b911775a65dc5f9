"""From a Hugging Face checkpoint to a bundle. torch and transformers are imported here and in training only."""
