"""Learning-rate schedules: one module for each plugin. Updates count from 1; the peak is the optimizer's lr."""
