"""How bytes travel between peers: messages as data, frames, encrypted connections that stay open."""
