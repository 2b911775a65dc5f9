"""spot-deploy."""
