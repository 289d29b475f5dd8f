"""One request's life: from the pool's queue to an endpoint and back."""
