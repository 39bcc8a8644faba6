"""The command that says where each rank of a hanging run is."""
