"""A byte budget as one line in the training loops of other libraries; each file imports its library when it is used."""
