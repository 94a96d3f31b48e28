"""What turns a sibling's block into the target's: the fitted maps, their artifact, conversion."""
