"""The texts of one step: cut into chunks, packed into rows, and run twice with the same random numbers."""
