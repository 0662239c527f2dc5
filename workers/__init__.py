"""workers: a model with weights, and two loops over it (prefill, decode) that know no Ray."""
