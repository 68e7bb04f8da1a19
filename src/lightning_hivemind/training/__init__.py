"""What Lightning's words mean in a swarm: samples, steps, schedulers, precision, checkpoints."""
