"""The pieces every encoder is made of; each names its axes and none knows a mesh."""
