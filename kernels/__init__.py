"""kernels: the operators of the model, as functions, each with a slow twin written like the paper."""
