"""A peer with a slow line hands its gradient to a quick one, at its own pace: that one gives both to a round."""
