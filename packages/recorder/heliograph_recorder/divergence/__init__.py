"""Where two recorded runs begin to differ, and what that means."""
