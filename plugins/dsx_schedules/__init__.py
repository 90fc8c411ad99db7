"""Learning-rate schedules: one module for each plugin. Updates count from 1; a group's peak is its own learning rate."""
