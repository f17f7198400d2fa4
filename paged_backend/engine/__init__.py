"""What a step is made of, and the Engine that wires it."""
