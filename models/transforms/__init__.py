"""Changes to how a model computes, never to what it computes."""
