"""What averages: the seam (:mod:`.base`) and the engines behind it."""
