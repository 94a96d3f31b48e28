"""The tier itself: find, read and write for one engine, and the policy of each ordered pair."""
