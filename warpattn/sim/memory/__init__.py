"""Global, shared and tensor memory with the vector clocks that find races."""
