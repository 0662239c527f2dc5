"""cluster: makes plain classes remote (Ray), launches, scales, and speaks to the operator."""
