"""The main job: `dsx run` builds model and data from a manifest, trains, evaluates, and saves the weights."""
