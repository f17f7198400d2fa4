"""What this machine and this installation are, and whether the kernels compute what they should on them."""
