"""Operations and answers as messages over a socket, between a client and the owner of a broker."""
