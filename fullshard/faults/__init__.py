"""What watches a run for faults: heartbeats, stacks, the flight recorder, and the words about a hang."""
