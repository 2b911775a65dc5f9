"""Graph contracts, and engines made from graphs: one module per backend. Imports numpy only."""
