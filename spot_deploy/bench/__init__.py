"""`bench`: drafters side by side on a user's target and prompts; `report`: its tables and figures."""
