import java.sql.Connection;
import java.sql.PreparedStatement;
import java.sql.ResultSet;
import javax.sql.DataSource;

/** A handler in Java: the work and the record of the event are one transaction (docs/consuming-tuning.md). */
public final class Handle {
    public interface Work {
        void run(Connection connection) throws Exception;
    }

    public static void handle(DataSource source, String eventId, Work work) throws Exception {
        try (Connection connection = source.getConnection()) {
            connection.setAutoCommit(false);
            try (PreparedStatement mark = connection.prepareStatement("SELECT processed_mark(?, ?)")) {
                mark.setString(1, eventId);
                mark.setString(2, "billing");
                try (ResultSet row = mark.executeQuery()) {
                    row.next();
                    if (row.getBoolean(1)) {
                        work.run(connection);
                    }
                }
                connection.commit();
            } catch (Exception error) {
                connection.rollback();
                throw error;
            }
        }
    }
}
