"""The compiled step of the prover environment, one file a stage."""
