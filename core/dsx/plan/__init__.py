"""What a run will take, found out before anything is allocated: it is built and stepped on the meta device."""
