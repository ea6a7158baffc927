"""A closed loop of agents around one scheduler and one simulated engine, in virtual time."""
